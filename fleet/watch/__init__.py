"""`rackproof watch`: a run as it goes on, from what the control node has of it and from what the hosts' exporters tell.

The playbook's own process writes what happens to `progress.jsonl` (playbooks/callback_plugins/rackproof_events.py).
Nothing is ever guessed: what cannot be told is unknown.
"""

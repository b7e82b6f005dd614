"""`rackproof watch`: show a run in progress, from its run directory and from the exporters on the hosts.

The playbook process writes events to `progress.jsonl` (callback plugin in playbooks/callback_plugins). Anything that is not
reported is shown as unknown.
"""

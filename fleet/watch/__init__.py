"""`rackproof watch`: show a run in progress, from its run directory and from the exporters on the hosts.

The callback plugin in playbooks/callback_plugins writes the events of the playbook to `progress.jsonl` in the run directory.
"""

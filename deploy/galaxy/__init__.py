"""Generate files that Ansible Galaxy requires."""

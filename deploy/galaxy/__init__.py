"""Files that Ansible Galaxy requires."""

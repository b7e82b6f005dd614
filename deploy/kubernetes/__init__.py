"""Kustomize manifests, inventories for them, and a check of the cluster to run before applying them."""

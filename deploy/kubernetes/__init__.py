"""Manifests for kustomize, and a check of the cluster before they are applied."""

"""Kustomize manifests, their inventories, and a program that checks a cluster before the manifests are applied."""

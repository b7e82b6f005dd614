"""Disks and file systems: plain /sys and /proc, statvfs, and the health log of NVMe disks."""

from collectors.storage.collector import StorageCollector

__all__ = ["StorageCollector"]

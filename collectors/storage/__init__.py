"""Disks and file systems, from /sys, /proc, statvfs, the device mapper, and the health log of NVMe disks."""

from collectors.storage.collector import StorageCollector

__all__ = ["StorageCollector"]

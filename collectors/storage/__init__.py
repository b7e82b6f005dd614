"""Disks and what lies on them: plain /sys and /proc, statvfs, and the health log of NVMe disks."""

from collectors.storage.collector import StorageCollector
from collectors.storage.mounts import Mount, mounts, read_only_under
from collectors.storage.nvme import health, smart_log

__all__ = ["Mount", "StorageCollector", "health", "mounts", "read_only_under", "smart_log"]

"""Data for training: text as packed batches, from memory or from shards on disk, and synthetic tasks."""

from zoo.data.shard_data import ShardData
from zoo.data.synthetic import TaskData
from zoo.data.text import TokenData

__all__ = ["ShardData", "TaskData", "TokenData"]

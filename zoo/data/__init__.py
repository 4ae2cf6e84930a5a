"""Data for training: text as packed batches, and synthetic tasks."""

from zoo.data.synthetic import TaskData
from zoo.data.text import TokenData

__all__ = ["TaskData", "TokenData"]

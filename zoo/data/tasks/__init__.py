"""Synthetic tasks: rows that a right answer can be computed for, in blocks that depend on a seed alone."""

from zoo.data.tasks.base import BLOCK, SPLIT_KEYS, TASKS, Task, TaskRows, make_task, task
from zoo.data.tasks.draws import distinct
from zoo.data.tasks.languages import RegBench
from zoo.data.tasks.mad import MadCompress, MadCopy, MadFuzzy, MadMemorize, MadRecall
from zoo.data.tasks.needle import Needle
from zoo.data.tasks.recall import MQAR, Overwrite
from zoo.data.tasks.tracking import Arithmetic, Parity

__all__ = [
    "BLOCK",
    "MQAR",
    "SPLIT_KEYS",
    "TASKS",
    "Arithmetic",
    "MadCompress",
    "MadCopy",
    "MadFuzzy",
    "MadMemorize",
    "MadRecall",
    "Needle",
    "Overwrite",
    "Parity",
    "RegBench",
    "Task",
    "TaskRows",
    "distinct",
    "make_task",
    "task",
]

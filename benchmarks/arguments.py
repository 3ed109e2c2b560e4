"""Types of command-line arguments, which say what is wrong before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    """1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def amount(text: str) -> float:
    """More than 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return number


def file(text: str) -> Path:
    """Of a folder that there is."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} can't be written: there is no such folder")
    return path


def folder(text: str) -> str:
    """One that there is."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return text

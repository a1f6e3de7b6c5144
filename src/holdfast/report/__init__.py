"""Results as a page to look at: one HTML file with its pictures inside, readable without a network."""

from .bench import bench_page, report_command
from .diagnosis import diagnosis_page
from .figures import forgetting
from .page import page
from .tables import tables
from .texts import csv, markdown

__all__ = ["bench_page", "csv", "diagnosis_page", "forgetting", "markdown", "page", "report_command", "tables"]

"""One self-contained page about a run, a comparison of runs, or the results of a bench."""

from areal_lite.record.report.write import write_bench, write_comparison, write_report

__all__ = ["write_bench", "write_comparison", "write_report"]

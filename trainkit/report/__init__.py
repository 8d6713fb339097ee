"""Output for the user: the table before the first step, the live line, the closing lines, plots."""

from trainkit.report.tables import closing_lines, print_closing, print_summary, summary_lines

__all__ = ["closing_lines", "print_closing", "print_summary", "summary_lines"]

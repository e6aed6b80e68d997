"""Reading recorded runs: journals to Perfetto files and summaries."""

"""What is told of records: numbers, an answer, verdicts, a page."""

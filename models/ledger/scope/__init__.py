"""What the ledger covers, as a table: a row for each thing that it does not, with its reason.

A row goes into the section of its feature: a status (`unknown`, `more`, `fails`, ...), the setting that it concerns, a
condition of facts joined by &, | and ~, and the sentence. A section's finding is that of its first row that holds, so a row
that says more comes before one that says less. `python -P -m peakcast.reports.capabilities` then writes the page again.
"""

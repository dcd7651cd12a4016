"""What the ledger covers, as a table: a row for each thing that it does not, with its reason.

A row goes into the section of its feature: a status (`unknown`, `more`, `fails`, ...), the setting that it concerns, a
condition of facts joined by &, | and ~, and the sentence. Sections give the first of their rows that holds, so a row that
tells more stands before one that tells less. `python -P -m peakcast.reports.capabilities` then writes the page again.
"""

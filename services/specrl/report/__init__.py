"""After the run: one page of figures, as self-contained HTML and as Markdown, of one run or of two side by side.

    reading -> figures -> sections | comparison -> document -> render

Reads run folders and changes nothing in them but to write the report. Called by `specrl report`.
"""

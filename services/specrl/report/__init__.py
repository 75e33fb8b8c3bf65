"""Makes the report of one run, or a comparison of two runs, as a self-contained HTML page and as Markdown.

    reading -> figures -> sections | comparison -> document -> render

It reads run folders, and writes nothing but the report. Called by `specrl report`.
"""

"""Shows results and advice to people: tables and sentences, Markdown and HTML, and SVG figures with their numbers.

Called by `cli`.
"""

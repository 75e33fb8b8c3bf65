"""The live page and its REST API. `app.py` lists the routes."""

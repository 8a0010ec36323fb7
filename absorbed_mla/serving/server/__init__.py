"""``absorbed-mla-serve``: one ``LLM`` for many clients, over OpenAI's HTTP interface.

``cli.py`` is the command, ``app.py`` the routes, ``protocol.py`` requests and answers as JSON,
``service.py`` the thread that runs the model, ``metrics.py`` what ``/metrics`` shows.
"""

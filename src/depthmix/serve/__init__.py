"""A model or two behind HTTP, in the shapes of OpenAI's interface.

    limits     every limit and its default
    problems   errors as a client sees them
    shapes     requests and answers as they travel
    metrics    counts and times for Prometheus
    worker     the one thread that owns an engine
    answers    the engine's events as answers
    lane       one of the models with its worker
    page       the live page
    gate       keys, hosts, and the size and pace of a body
    app        the routes
    server     sockets, slow connections, signals
    ray        replicas in a Ray cluster

The libraries are an extra: `pip install 'depthmix[serve]'`; replicas need another, `ray`. Knows
the engine's interface, and nothing of networks or of training.
"""

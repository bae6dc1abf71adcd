"""`otaro serve`: one resident model behind HTTP, the precision a field of the request.

    app         routes, and what every request passes first
    protocol    what may be asked, checked field by field (`fields`)
    decisions   the same for typed decisions, /v1/systemone
    service     requests become streams of the engine, within `settings`
    precision   which precision a request is answered at
    shapes      answers as OpenAI's clients read them
    http        the connection: clients that are slow, silent or gone
    planes      planes that arrive later, and those that nobody uses
    server      a socket, a process, its end

It needs the extra `serve` (starlette, uvicorn, prometheus-client), and so is imported by nobody but the
command.
"""

"""The HAProxy that Ray Serve starts, with what Serve's template leaves wrong put right.

Serve renders a configuration and starts a binary on it; no setting reaches the places in question, but the path of the
binary is a setting, so a wrapper edits the file first:

- A statistics page and a metrics page on all interfaces, on fixed ports, become unix sockets in a private folder.
- What Serve makes of HAProxy's own 502, 503 and 504 is a 500 in plain text. They become 503 in the router's words: the
  client is told to send its request again, and when.
- Methods that the server behind HAProxy cannot parse are refused here, and Serve's own pages (``/-/...``), which need
  no key, are not shown.

What is not HTTP at all, or has a head beyond HAProxy's buffer of 16 kB, still gets its 400 in HTML: it is compiled in.
"""

from __future__ import annotations

import shlex
from http import HTTPStatus
from pathlib import Path

from router.api import ApiError, Fault

_LOST = ApiError(Fault.NOT_READY, "no server took this request or the one that did was lost; send it again")
ANSWERS = {
    404: ApiError(Fault.ROUTE_NOT_FOUND, "Not Found"),
    405: ApiError(Fault.METHOD_NOT_ALLOWED, "Method Not Allowed"),
    502: _LOST,
    503: _LOST,
    504: _LOST,
}
"""What is said where HAProxy would answer with the status of the key."""

_WRAPPER = """#!/bin/sh
# Starts HAProxy on the configuration that Ray Serve has written, after changing it.
previous=
for argument; do
  if [ "$previous" = -f ] && ! grep -q {folder}/rules "$argument"; then
    sed -i \\
      -e 's#^\\( *\\)bind \\**:\\([0-9]*\\)#\\1bind unix@{folder}/\\2.sock mode 600#' \\
      -e '/^ *errorfile /d' \\
      -e '/^defaults/r {folder}/answers' \\
      -e '/^frontend http_frontend/r {folder}/rules' \\
      "$argument"
  fi
  previous=$argument
done
exec {binary} "$@"
"""

_RULES = """    # from {folder}/rules
    http-after-response set-header x-request-id %[uuid()] if !{{ res.hdr(x-request-id) -m found }}
    http-request deny deny_status 405 if !{{ method GET HEAD POST PUT PATCH DELETE OPTIONS TRACE }}
    http-request deny deny_status 404 if {{ path_beg /-/ }}
    http-request deny deny_status 404 if !{{ path_beg / }}
"""


def write_wrapper(folder: Path, binary: str) -> Path:
    """Write into `folder`, private and short, what starts `binary` with a changed configuration; returns its path."""
    for status, error in ANSWERS.items():
        (folder / f"{status}.http").write_bytes(_raw_answer(error))
    (folder / "answers").write_text("".join(f"    errorfile {status} {folder}/{status}.http\n" for status in ANSWERS))
    (folder / "rules").write_text(_RULES.format(folder=folder))
    wrapper = folder / "haproxy"
    wrapper.write_text(_WRAPPER.format(folder=folder, binary=shlex.quote(binary)))
    wrapper.chmod(0o700)
    return wrapper


def _raw_answer(error: ApiError) -> bytes:
    """The answer as it goes over the wire. HAProxy keeps the connection or closes it as it needs."""
    body = error.body()
    status = HTTPStatus(error.row.status)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body

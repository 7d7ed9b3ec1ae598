"""Which requests may come in: their API key, the site whose page sends them, and the host that they name."""

from __future__ import annotations

import base64
import binascii
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from ..errors import ApiError
from ..settings import ServerSettings, is_loopback

OPEN_ROUTES = ("/health", "/ready")
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class Guard:
    """Refuses requests without a key, and those of other sites' pages that a browser has given one itself.

    A server without keys refuses all those of other sites' pages.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings

    def key(self, headers: Headers) -> int | None:
        """Which of the server's keys the request has; None if it has none of them."""
        given, other = headers.get("authorization", ""), headers.get("x-api-key", "")
        same = (_same_key(given, key) | _equal(other, key) for key in self.settings.api_keys)
        return next((i for i, found in enumerate(same) if found), None)

    def refusal(self, method: str, path: str, headers: Headers, has_key: bool) -> ApiError | None:
        """The error for a request that may not come in; None if it may."""
        keys = self.settings.api_keys
        if path in OPEN_ROUTES:
            return None
        if keys and not has_key:
            # Basic makes a browser ask for a password. Only opening the page should do that.
            challenge = {"WWW-Authenticate": 'Basic realm="eagle3-llama"' if path == "/" else "Bearer"}
            message = (
                "this server needs an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            )
            return ApiError(401, message, code="invalid_api_key", headers=challenge)
        added = keys and method not in SAFE and headers.get("authorization", "")[:6].lower() == "basic "
        if (not keys and not self._own_origin(headers.get("origin"))) or (added and not self._same(headers)):
            message = "the request comes from another site's page: allow that site with --cors-origin"
            return ApiError(403, message, code="origin")
        if not keys and not self._own_host(headers.get("host")):
            message = "the Host header names another site: allow it with --cors-origin, or set an API key"
            return ApiError(403, message, code="host")
        return None

    def _own_host(self, host: str | None) -> bool:
        """True if the Host header names this server or an allowed site.

        This prevents DNS rebinding. A site can point its own host name at this machine. Its pages then reach
        this server as their own origin, and a browser sends no Origin header with such a GET.
        """
        return (
            host is None
            or self._own_name(f"//{host}")
            or any(f"{scheme}://{host}" in self.settings.cors_origin for scheme in ("http", "https"))
        )

    def _same(self, headers: Headers) -> bool:
        """True if a request with a browser's password comes from this server's page, or an allowed site's.

        A browser sends the password that opened the page with every later request, whatever page makes it.
        """
        origin, allowed = headers.get("origin"), self.settings.cors_origin
        if origin is None or "*" in allowed or origin in allowed:
            return True
        return origin.partition("://")[2] == headers.get("host")

    def _own_origin(self, origin: str | None) -> bool:
        """True if the request comes from this server's page, from an allowed site, or from no page.

        Without a key, any page in the user's browser could send requests to a server on loopback. Browsers
        name the page's site in the Origin header.
        """
        return origin is None or origin in self.settings.cors_origin or self._own_name(origin)

    def _own_name(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return "*" in self.settings.cors_origin or is_loopback(host) or host == self.settings.host


def _same_key(authorization: str, key: str) -> bool:
    """True if the header carries the key: as `Bearer KEY`, or as the password of Basic (from browsers)."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return _equal(given, key)


def _equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.strip().encode(), key.encode())

"""A browser for the page."""

from chromium import driver, open_page

__all__ = ["driver", "open_page"]

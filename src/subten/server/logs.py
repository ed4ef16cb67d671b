"""Log lines as JSON objects, one per line."""

from __future__ import annotations

import json
import logging

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "taskName"}


class JsonLines(logging.Formatter):
    """Time, level, logger, message, and whatever else a line was given."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in record.__dict__.items() if name not in _PLAIN},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_json_lines() -> None:
    """From now on the log of the process goes to stderr as JSON, at level info for the server."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("subten", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)

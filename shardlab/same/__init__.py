"""Whether a training script is right: its gradients on several ranks against those of one process.

``shardlab same SCRIPT`` runs a script on ranks (``ranks``, ``process``), where its steps are noted (``capture``,
``rows``, ``pieces``), and again in one process (``alone``); compares both (``union``, ``compare``); and says what
differs, and why (``coefficients``, ``causes``, ``answer``). ``watch`` does the same inside a loop.
"""

from typing import TYPE_CHECKING

from shardlab.installed import imported_when_used

if TYPE_CHECKING:
    from shardlab.same.answer import Answer
    from shardlab.same.watched import watch

__all__ = ["Answer", "watch"]

__getattr__ = imported_when_used(__name__, __file__)

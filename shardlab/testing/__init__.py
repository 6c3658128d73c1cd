"""Is a strategy of your own right, against one process (``check_strategy``)? Do ranks agree (``check_agreement``)?"""

from shardlab.testing.agreement_check import check_agreement
from shardlab.testing.check import check_strategy

__all__ = ["check_agreement", "check_strategy"]

"""Which groups still fit: the exact test for every structure of quotas."""

from knit_data.seats.quota_seats import Line, QuotaSeats

__all__ = ["Line", "QuotaSeats"]

"""The tables. Money is in units (``proxy.store.money``), times are seconds since 1970, UTC."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

organizations = Table(
    "organizations",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("suspended", Boolean, nullable=False, default=False),
    Column("credit", BigInteger, nullable=True),  # what was paid in; null: not prepaid
    Column("requests_per_minute", Integer),
    Column("input_tokens_per_minute", BigInteger),
    Column("parallel_requests", Integer),
    Column("created_at", Float, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("shown", String(32), nullable=False),  # prefix and last four, for display
    Column("organization", String(128)),
    Column("models", JSON),
    Column("requests_per_minute", Integer),
    Column("input_tokens_per_minute", BigInteger),
    Column("parallel_requests", Integer),
    Column("spend_limit", BigInteger),
    Column("spend_period", String(8)),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("created_at", Float, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("at", Float, nullable=False),
    Column("day", Integer, nullable=False),  # days since 1970, UTC
    Column("key_id", String(160), nullable=False),
    Column("organization", String(128)),
    Column("end_user", Text),
    Column("model", String(128), nullable=False),
    Column("asked_model", Text, nullable=False),
    Column("deployment", String(512)),
    Column("stream", Boolean, nullable=False),
    Column("input", BigInteger, nullable=False),
    Column("cache_read", BigInteger, nullable=False),
    Column("cache_write_5m", BigInteger, nullable=False),
    Column("cache_write_1h", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
    Column("thinking", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
    Column("prices", JSON, nullable=False),
    Column("exactness", String(16), nullable=False),
    Column("reason", Text),
    Column("raw", JSON, nullable=False),
    Index("usage_by_time", "at"),
    Index("usage_by_key", "key_id", "at"),
    Index("usage_by_organization", "organization", "at"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("scope", String(16), primary_key=True),  # key or organization
    Column("name", String(160), primary_key=True),
    Column("period", String(16), primary_key=True),  # "" for all time, else such as 2026-11
    Column("spent", BigInteger, nullable=False),
    Column("reserved", BigInteger, nullable=False),
)

reservations = Table(
    "reservations",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("scope", String(16), primary_key=True),
    Column("name", String(160), nullable=False),
    Column("period", String(16), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("gateway", String(64), nullable=False),
    Index("reservations_by_gateway", "gateway"),
)

gateways = Table(
    "gateways",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("seen_at", Float, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("created_at", Float, nullable=False),
)

revisions = Table(
    "revisions",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("revision", BigInteger, nullable=False),
)
"""How often keys and organizations were changed: running gateways look whether it has grown."""

"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "budgets",
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=160), nullable=False),
        sa.Column("period", sa.String(length=16), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "name", "period"),
    )
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("shown", sa.String(length=32), nullable=False),
        sa.Column("organization", sa.String(length=128), nullable=True),
        sa.Column("models", sa.JSON(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("input_tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("parallel_requests", sa.Integer(), nullable=True),
        sa.Column("spend_limit", sa.BigInteger(), nullable=True),
        sa.Column("spend_period", sa.String(length=8), nullable=True),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "organizations",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.Column("credit", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("input_tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("parallel_requests", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "reservations",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=160), nullable=False),
        sa.Column("period", sa.String(length=16), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("gateway", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "scope"),
    )
    op.create_index("reservations_by_gateway", "reservations", ["gateway"], unique=False)
    op.create_table(
        "revisions",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "usage",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(length=160), nullable=False),
        sa.Column("organization", sa.String(length=128), nullable=True),
        sa.Column("end_user", sa.Text(), nullable=True),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("asked_model", sa.Text(), nullable=False),
        sa.Column("deployment", sa.String(length=512), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cache_read", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_1h", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("thinking", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("prices", sa.JSON(), nullable=False),
        sa.Column("exactness", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("raw", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("usage_by_key", "usage", ["key_id", "at"], unique=False)
    op.create_index("usage_by_organization", "usage", ["organization", "at"], unique=False)
    op.create_index("usage_by_time", "usage", ["at"], unique=False)

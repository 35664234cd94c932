"""Operations behind the /evicpress endpoints."""

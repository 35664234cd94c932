"""Carries out what a policy decides, and keeps the journal."""

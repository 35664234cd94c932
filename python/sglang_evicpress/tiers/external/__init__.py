"""Store that several servers share: entries as values of an engine that others run."""

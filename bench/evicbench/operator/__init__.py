"""Series, alerts, the dashboard of Grafana and the page of the server, and what they cost: `make show-operator`."""

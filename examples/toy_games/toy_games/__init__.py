"""Two games of several turns as a plug-in: each is a data source, a workflow and a verifier of one name."""

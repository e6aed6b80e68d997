"""From records to answers: attribution, step budgets, objectives, one request's report."""

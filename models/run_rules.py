"""List the configuration rules that apply only to a run that is started or checked."""

from triaxis.engine.config.rules.extension import given_is_chosen
from triaxis.engine.config.rules.problem import Rule
from triaxis.engine.pipeline.programs import schedule_file_runs
from triaxis.models.parameter_groups import groups_have_parameters

RULES_OF_A_RUN: tuple[Rule, ...] = (schedule_file_runs, groups_have_parameters, given_is_chosen)
"""Rules that read schedule programs and parameter names, which `triaxis.engine.config` cannot, or that concern runs only."""

"""The rules of those who start a run or check one, besides those of every configuration."""

from triaxis.engine.config.extension_section import given_is_chosen
from triaxis.engine.config.section import Rule
from triaxis.engine.pipeline.programs import schedule_file_runs
from triaxis.models.parameter_groups import groups_have_parameters

RULES_OF_A_RUN: tuple[Rule, ...] = (schedule_file_runs, groups_have_parameters, given_is_chosen)
"""They read what no rule of `triaxis.engine.config` can, programs of a schedule and names of parameters, or are for runs alone."""

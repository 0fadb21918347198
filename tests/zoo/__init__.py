"""A zoo of models, and the truth about each: how many sites of each concept its programs hold.

`catalogue` lists the models and their programs; `truths` computes what is true of them from their configurations, by the
rules written there, without the models and without FusionLab. No file of this package imports FusionLab.
"""

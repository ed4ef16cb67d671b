import copy
import unittest

import settings
from settings import for_user, merged


class SettingsTest(unittest.TestCase):
    def setUp(self):
        self.before = copy.deepcopy(settings.DEFAULTS)

    def tearDown(self):
        changed, settings.DEFAULTS = settings.DEFAULTS != self.before, self.before
        self.assertFalse(changed, "the defaults have changed")

    def test_a_section_is_merged(self):
        self.assertEqual(for_user({"editor": {"tabs": 2}})["editor"], {"tabs": 2, "rulers": []})

    def test_users_share_nothing(self):
        for_user({"theme": {"name": "dark"}})
        self.assertEqual(for_user({})["theme"]["name"], "light")

    def test_lists_are_not_shared(self):
        for_user({})["editor"]["rulers"].append(80)
        self.assertEqual(for_user({})["editor"]["rulers"], [])

    def test_what_the_user_gave_is_not_shared(self):
        own = {"theme": {"fonts": ["Mono"]}}
        for_user(own)["theme"]["fonts"].append("Sans")
        self.assertEqual(own, {"theme": {"fonts": ["Mono"]}})

    def test_deep_sections(self):
        result = merged({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 3}}})
        self.assertEqual(result, {"a": {"b": {"c": 3, "d": 2}}})

    def test_none_removes(self):
        self.assertNotIn("beta", for_user({"beta": None}))
        self.assertNotIn("tabs", for_user({"editor": {"tabs": None}})["editor"])

    def test_a_section_replaces_a_value(self):
        self.assertEqual(for_user({"beta": {"on": True}})["beta"], {"on": True})

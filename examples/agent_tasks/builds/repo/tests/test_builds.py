import unittest

from builds import CircleError, build_order


class BuildsTest(unittest.TestCase):
    def test_a_chain(self):
        self.assertEqual(build_order({"app": ["lib"], "lib": ["core"], "core": []}, "app"), ["core", "lib", "app"])

    def test_what_two_need_is_built_once(self):
        needs = {"app": ["a", "b"], "a": ["core"], "b": ["core"], "core": []}
        self.assertEqual(build_order(needs, "app"), ["core", "a", "b", "app"])

    def test_what_is_needed_twice_is_built_once(self):
        needs = {f"p{n}": [f"p{n + 1}", f"p{n + 1}"] for n in range(14)} | {"p14": []}
        self.assertEqual(len(build_order(needs, "p0")), 15)

    def test_a_circle(self):
        with self.assertRaisesRegex(CircleError, "lib"):
            build_order({"app": ["lib"], "lib": ["core"], "core": ["lib"]}, "app")

    def test_itself(self):
        with self.assertRaises(CircleError):
            build_order({"app": ["app"]}, "app")

    def test_unknown(self):
        with self.assertRaises(KeyError):
            build_order({"app": ["nothing"]}, "app")

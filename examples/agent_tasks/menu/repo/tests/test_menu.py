import unittest

from menu import Menu


class MenuTest(unittest.TestCase):
    def test_each_button_has_its_label(self):
        menu = Menu()
        menu.add_all(["open", "save", "quit"], str.upper)
        self.assertEqual([menu.press(label) for label in ("open", "save", "quit")], ["OPEN", "SAVE", "QUIT"])

    def test_each_call_has_its_action(self):
        menu = Menu()
        menu.add_all(["a", "b"], str.upper)
        menu.add_all(["c"], lambda label: label * 2)
        self.assertEqual([menu.press(label) for label in "abc"], ["A", "B", "cc"])

    def test_labels_may_come_from_a_generator(self):
        menu = Menu()
        menu.add_all((label for label in "xy"), str.upper)
        self.assertEqual(menu.press("x"), "X")

    def test_steps(self):
        menu = Menu()
        menu.add_steps("all", [lambda: 1, lambda: 2])
        self.assertEqual(menu.press("all"), [1, 2])

    def test_steps_do_not_change_with_the_list(self):
        menu, actions = Menu(), [lambda: 1]
        menu.add_steps("all", actions)
        actions.append(lambda: 2)
        self.assertEqual(menu.press("all"), [1])

    def test_a_button_that_is_not_there(self):
        with self.assertRaises(KeyError):
            Menu().press("help")

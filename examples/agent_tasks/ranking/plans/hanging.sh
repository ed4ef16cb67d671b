sed -i 's|, reverse=True||' ranking.py
yes 'still sorting' > /dev/null

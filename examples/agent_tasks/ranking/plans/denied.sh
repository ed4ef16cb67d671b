sed -i 's|, reverse=True||' ranking.py
sudo apt-get install -y python3-pandas
sed -i '1i import pandas' ranking.py

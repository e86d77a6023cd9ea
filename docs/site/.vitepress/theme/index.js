// VitePress' own theme, with system fonts: nothing is downloaded.
import Theme from 'vitepress/theme-without-fonts'
import './style.css'

export default Theme

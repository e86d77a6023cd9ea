// Package cache names the folder where the lab and the image's builder keep what takes long to get.
package cache

import (
	"fmt"
	"os"
	"path/filepath"
)

// Folder returns where built tools and downloads are kept between runs: LANDFALL_CACHE, else
// landfall in the user's cache folder.
func Folder() (string, error) {
	if dir := os.Getenv("LANDFALL_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder to keep built tools in; set LANDFALL_CACHE: %w", err)
	}
	return filepath.Join(dir, "landfall"), nil
}

//go:build !unix

package listen

import (
	"errors"
	"io/fs"
)

// chmodSocket fails, as only landfallctl is built for such a system, and it serves nothing.
func chmodSocket(uintptr, fs.FileMode) error { return errors.ErrUnsupported }

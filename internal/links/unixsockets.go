package links

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// UnixOwners returns the users whose listening Unix sockets have abstract names that begin so, in the calling thread's
// network namespace, by these names. Kernels before 5.3 name no users, and some none of the sockets.
func UnixOwners(prefix string) (map[string]uint32, error) {
	owners := map[string]uint32{}
	_, err := complete(func() ([]struct{}, error) {
		request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		request.AddData(unixRequest{})
		return nil, request.ExecuteIter(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(m []byte) bool {
			if name, uid, ok := ownerOf(m); ok && strings.HasPrefix(name, prefix) {
				owners[name] = uid
			}
			return true
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list Unix sockets: %w", err)
	}
	return owners, nil
}

// unixRequest asks for the listening Unix sockets with their names and users (struct unix_diag_req of
// linux/unix_diag.h).
type unixRequest struct{}

const (
	sizeofUnixRequest = 24
	sizeofUnixMessage = 16 // struct unix_diag_msg
	showName, showUID = 1, 0x40
	listening         = 10 // TCP_LISTEN of linux/tcp_states.h
)

func (unixRequest) Len() int { return sizeofUnixRequest }

func (unixRequest) Serialize() []byte {
	b := []byte{unix.AF_UNIX, 0, 0, 0}
	for _, word := range []uint32{1 << listening, 0, showName | showUID, 0, 0} { // states, inode, show and a cookie
		b = binary.NativeEndian.AppendUint32(b, word)
	}
	return b
}

// ownerOf returns the abstract name of a socket, with @ for its first byte, and the user that made it.
func ownerOf(m []byte) (name string, uid uint32, ok bool) {
	if len(m) < sizeofUnixMessage {
		return "", 0, false
	}
	attrs, err := attributes(m[sizeofUnixMessage:])
	if err != nil {
		return "", 0, false
	}
	for _, a := range attrs {
		switch {
		case a.kind == netlink.UNIX_DIAG_NAME && len(a.value) > 1 && a.value[0] == 0:
			name = "@" + string(a.value[1:])
		case a.kind == netlink.UNIX_DIAG_UID && len(a.value) == 4:
			uid, ok = binary.NativeEndian.Uint32(a.value), true
		}
	}
	return name, uid, ok && name != ""
}

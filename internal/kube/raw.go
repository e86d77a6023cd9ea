package kube

import (
	"context"
	"fmt"
	"io"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Raw returns what the API server answers to a GET of path, as JSON; nil if it does not know the
// path.
func (c *Client) Raw(ctx context.Context, path string) ([]byte, error) {
	return c.raw(ctx, path, c.get(path))
}

// RawPage is Raw for a part of a list: at most so many objects, from where the last part has ended.
func (c *Client) RawPage(ctx context.Context, path string, objects int, from string) ([]byte, error) {
	request := c.get(path).Param("limit", strconv.Itoa(objects))
	if from != "" {
		request = request.Param("continue", from)
	}
	return c.raw(ctx, path, request)
}

func (c *Client) get(path string) *rest.Request {
	return c.rest.core.Get().AbsPath(path).SetHeader("Accept", "application/json")
}

func (c *Client) raw(ctx context.Context, path string, request *rest.Request) ([]byte, error) {
	raw, err := request.Do(ctx).Raw()
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get %s: %w", path, err)
	}
	return raw, nil
}

// PodLog returns the last lines of the log of a container, or with previous of the process before
// it: at most so many bytes of the end, and whether there were more.
func (c *Client) PodLog(ctx context.Context, pod lb.Key, container string, previous bool, lines int64, most int) (
	log []byte, more bool, err error) {
	stream, err := c.rest.core.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).
		SubResource("log").VersionedParams(&corev1.PodLogOptions{Container: container, Previous: previous,
		TailLines: &lines, Timestamps: true}, parameters).Stream(ctx)
	if err != nil {
		return nil, false, c.looked(err, "get", "", "pods/log", pod.Namespace)
	}
	defer stream.Close()
	piece := make([]byte, 64<<10)
	for {
		n, err := stream.Read(piece)
		if log = append(log, piece[:n]...); len(log) > 2*most {
			log, more = append(log[:0], log[len(log)-most:]...), true
		}
		if err != nil {
			if err != io.EOF {
				return nil, false, c.looked(err, "get", "", "pods/log", pod.Namespace)
			}
			if len(log) > most {
				log, more = log[len(log)-most:], true
			}
			return log, more, nil
		}
	}
}
